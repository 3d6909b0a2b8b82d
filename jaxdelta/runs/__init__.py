"""How a model is run: one loop over segments, what may change and watch it, and its derivatives."""
