"""Soak test: many streams through a real proxy while engines are killed, and what must hold afterwards."""
