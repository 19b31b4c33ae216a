"""Latent groups: experts of a layer that tokens pick together, and so should live together."""
