"""Sensitivity of a loss to states, write strengths, decays and heads, and how far it can be trusted."""
