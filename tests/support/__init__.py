"""What tests share: services, engines and servers to test against, and what they are held to."""
