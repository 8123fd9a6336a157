"""Public traces of other formats, converted for the tournament."""
