"""How many expert actors and attention replicas there should be: decisions only, no action."""
