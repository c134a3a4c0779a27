"""What the laboratory knows of averages of replicas."""

#: The exchange whose cost a plan measures: an average of all weights with an outer step, by codec.
AVERAGES = "averages"
