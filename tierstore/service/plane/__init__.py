"""The data plane, which knows no transport: requests planned, looked up and scored, one by one or joined."""
