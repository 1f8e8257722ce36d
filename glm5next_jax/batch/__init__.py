"""Batch jobs: a file of requests in, a file of answers out (`glm5next-generate`)."""
