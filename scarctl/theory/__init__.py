"""Compute rework bounds, convergence rates and failure costs. No torch."""
