package app

import (
	"errors"
	"fmt"
	"regexp"

	"github.com/spf13/pflag"
)

var number = regexp.MustCompile(`^-?[0-9]+$`)

// FlagProblem says of a flag's value that is none what it takes, in words for
// people; other errors stay as they are.
func FlagProblem(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	flag, value := invalid.GetFlag(), invalid.GetValue()
	takes := fmt.Sprintf("it takes a %s", flag.Value.Type())
	switch flag.Value.Type() {
	case "duration":
		takes = "give a number with a unit, such as 90s, 10m or 2h"
		if number.MatchString(value) {
			takes = fmt.Sprintf("give a unit, too, such as %ss", value)
		}
	case "uint32":
		takes = "it takes a whole number: " + flag.Usage
	case "intSlice":
		_, usage := pflag.UnquoteUsage(flag)
		takes = "it takes a whole number: " + usage
	case "bool":
		takes = "it is true or false"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, value, takes)
}
