"""A model's state on devices: locations, versions and copies."""
