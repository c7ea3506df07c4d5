"""Compute rework bounds, convergence rates, extrapolation fits and failure costs. No torch."""
