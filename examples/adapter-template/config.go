package main

import (
	"errors"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// config is the config block of a registry of type inventory. The tags make the
// schema: for `isthmus validate`, for editors, for `isthmus docs`.
type config struct {
	Servers []string `json:"servers,omitempty" jsonschema:"minItems=1" jsonschema_description:"URLs of the servers, which are equal: http://host:8000. Required."`
	plugin.HTTP

	Interval    plugin.Duration `json:"interval,omitempty" jsonschema_description:"How often the document is read. Default: 10s."`
	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage. Default: 30s."`
}

var defaults = config{
	Interval:    plugin.Duration(10 * time.Second),
	RemoveGrace: plugin.Duration(30 * time.Second),
}

// Validate returns everything that the schema cannot find, at once.
func (c config) Validate() error {
	errs := append(plugin.CheckServers("servers", c.Servers), c.HTTP.Check()...)
	if c.Interval <= 0 {
		errs = append(errs, &plugin.FieldError{Field: "interval", Reason: "must be more than 0"})
	}
	return errors.Join(errs...)
}
