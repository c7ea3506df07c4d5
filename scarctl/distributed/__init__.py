"""Many ranks: what one session cannot do alone."""
