"""Policies that place tables one by one, trained by reinforcement learning, and used offline."""
