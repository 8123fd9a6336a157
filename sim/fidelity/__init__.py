"""How near the simulated engines come to recorded ones: read a recording, simulate what it sent, compare."""
