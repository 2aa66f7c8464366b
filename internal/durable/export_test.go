package durable

// Classify gives a system error its kind.
func Classify(path string, err error) error { return wrap("write", path, err) }
