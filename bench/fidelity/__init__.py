"""How near the simulator comes to published tables, to recordings of real engines, and to itself in real time."""
