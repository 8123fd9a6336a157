"""Parts that comparisons in the cells of the tournament share. May import the tournament and numpy."""
