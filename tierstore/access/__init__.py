"""Access: roles, and the tokens that carry them. Knows no transport."""
