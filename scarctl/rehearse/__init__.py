"""Show that a program continues bit for bit after it was killed, by running it: undisturbed, and interrupted."""
