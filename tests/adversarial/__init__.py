"""Attack the store. Each attack is a module, run by hand in its long form; tests run its short form."""
