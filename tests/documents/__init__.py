"""Read the documents and the sources as text, run nothing of the product, and report what breaks a rule."""
