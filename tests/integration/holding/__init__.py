"""Holding behind the real proxy, with simulated engines in processes of their own."""
