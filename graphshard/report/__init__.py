"""A page to look at: plan, timeline, memory and dump of an estimated step in one HTML file."""
