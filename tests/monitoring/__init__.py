"""Tests of configs/monitoring: alert rules, scrape file and dashboard."""
