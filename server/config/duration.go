package config

import (
	"encoding/json"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// Duration is a duration. In the file it is text such as 90s, 10m or 1h.
type Duration time.Duration

// String returns the duration in the form of the file.
func (d Duration) String() string {
	s := time.Duration(d).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

var isDuration = regexp.MustCompile(conf.DurationPattern)

// MarshalJSON encodes the duration as text.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON decodes text. A value out of range becomes the longest
// Duration.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return conf.ErrDuration
	}
	t, err := time.ParseDuration(s)
	switch {
	case err == nil:
		*d = Duration(t)
	case isDuration.MatchString(s):
		*d = math.MaxInt64
	default:
		return conf.ErrDuration
	}
	return nil
}

// JSONSchema describes the duration as text.
func (Duration) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: conf.DurationPattern, Examples: []any{"90s", "10m"}}
}
