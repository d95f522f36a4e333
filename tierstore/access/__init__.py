"""Who may do what: roles, and the tokens that carry them. Knows no transport."""
