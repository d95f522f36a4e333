"""The data plane, which knows no transport: requests are planned, looked up and scored, one by one or in batches."""
