"""The paths that the benchmark moe compares."""
