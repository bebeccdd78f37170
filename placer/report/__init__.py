"""Tables and pictures of profiles and placements, for people."""
