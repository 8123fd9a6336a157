"""Admin endpoints: instances, policy, breakdown, explain, fleet changes, and their OpenAPI schema."""
