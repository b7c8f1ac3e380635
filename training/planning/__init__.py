"""What a recipe needs and how long a context fits, without running it: traces, engines' books, roofline, search."""
