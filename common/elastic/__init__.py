"""Runs that survive the loss of ranks and take new ones: the agent, its hosts, their messages, and the loop."""
