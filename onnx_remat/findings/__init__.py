"""What can be said of a model: estimate, explain, sweep, check, pictures."""
