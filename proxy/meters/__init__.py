"""Truth and regret meters: predictions against the engines' reports, hit rates, and checks for silent failures.

May import what is below it in the layers of `proxy`: fleet, events, requests and settings.
"""
