"""Many servers: which of them start a cold model together, how their links are shared, and when it is one server's again."""
