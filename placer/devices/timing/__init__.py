"""Times of work on devices: passes, copies, and one time axis for the events of several devices."""
