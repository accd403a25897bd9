"""For those who work on this project: generators of docs/ and deployments/monitoring/, and what a newer upstream changes.

The service imports none of them.
"""
