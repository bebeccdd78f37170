"""The paths: each file answers those of one noun."""
