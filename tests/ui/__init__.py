"""The dashboard: its figures and routes, and its pages in a headless browser."""
