"""What is served at this moment, and what the next start is to serve."""
