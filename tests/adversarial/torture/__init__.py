"""Torture: a real training loop and its daemon are killed, stopped and ended at random moments, thousands of times.

    python -m tests.adversarial.torture --rounds 500

After every round the store verifies, holds nothing older than what was acknowledged, and every copy in it is whole; and
what the next process resumes from is whole. Every value of the trained state is the number of its step, in the
parameter and in its optimizer slot, so a mix of steps inside one partition shows.
"""
