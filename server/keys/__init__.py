"""Who may do what: keys, where they are kept, and what each of them may use."""
