"""What is lost, killed, damaged or taken away, and how soon work goes on."""
