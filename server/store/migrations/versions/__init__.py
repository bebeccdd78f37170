"""One file per migration; a released migration never changes."""
