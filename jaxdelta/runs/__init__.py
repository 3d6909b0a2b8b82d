"""Segmented runs: the loop over segments, interventions, edits and observers, and derivatives."""
