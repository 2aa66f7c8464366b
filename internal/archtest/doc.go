// Package archtest holds the code to its shape: which package may import
// which, how large things may grow, what every package and exported name must
// say about itself, and that the documents point to functions that exist. It
// is all tests; nothing imports it.
package archtest
