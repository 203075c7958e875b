package eureka

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type eureka. Missing fields
// default to DefaultConfig.
type Config struct {
	Servers []string `json:"servers,omitempty" jsonschema:"minItems=1" jsonschema_description:"URLs of the servers, which are peers of each other: http://host:8761/eureka. One is used at a time. Without a path it is /eureka. Required."`
	plugin.HTTP

	ServiceBy string           `json:"service_by,omitempty" jsonschema:"enum=app,enum=vip,enum=secure_vip" jsonschema_description:"What makes a service: app, the application's name; vip or secure_vip, each name in vipAddress or secureVipAddress of its instances. Default: app."`
	Services  plugin.Selection `json:"services,omitempty" jsonschema_description:"Which services to follow, by name. Names of applications are in upper case."`
	Address   string           `json:"address,omitempty" jsonschema:"enum=ip,enum=hostname" jsonschema_description:"Which address of an instance to use: ip (ipAddr) or hostname (hostName). An instance without it is reached at the other one. Default: ip."`
	Ports     plugin.PortKeys  `json:"ports,omitempty" jsonschema_description:"More ports of an instance, from its metadata. A value that is not a port number is listed as a problem."`

	Interval     plugin.Duration `json:"interval,omitempty" jsonschema_description:"How often changes are asked for, 1s to 10m; less often if answers take long. Servers renew their answers every 30 s by default (responseCacheUpdateIntervalMs). Default: 10s."`
	FullInterval plugin.Duration `json:"full_interval,omitempty" jsonschema_description:"How often everything is asked for although changes would be enough, 1m to 24h. Default: 10m."`
	RemoveGrace  plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage, a move to another server or a sudden loss, so that clients can register again; they try every 30 s. 0s removes at once. Default: 2m."`
	MinShare     float64         `json:"min_share,omitempty" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the known instances that a whole listing must still have to be believed at once. With less, missing ones are kept for remove_grace. 0 believes every share. Default: 0.5."`
	AcceptEmpty  bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe an empty registry. By default it removes nothing."`
}

// Values of Config.ServiceBy.
const (
	byApp       = "app"
	byVIP       = "vip"
	bySecureVIP = "secure_vip"
)

// Values of Config.Address.
const (
	addressIP       = "ip"
	addressHostname = "hostname"
)

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	ServiceBy:    byApp,
	Address:      addressIP,
	Interval:     plugin.Duration(10 * time.Second),
	FullInterval: plugin.Duration(10 * time.Minute),
	RemoveGrace:  plugin.Duration(2 * time.Minute),
	MinShare:     0.5,
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	errs = append(errs, plugin.CheckServers("servers", c.Servers)...)
	errs = append(errs, c.HTTP.Check()...)
	https := slices.ContainsFunc(c.Servers, func(s string) bool { return strings.HasPrefix(s, "https://") })
	if c.TLS != (plugin.TLS{}) && !https {
		bad("tls", "no server is written with https://, so TLS would not be used")
	}
	if !slices.Contains([]string{"", byApp, byVIP, bySecureVIP}, c.ServiceBy) {
		bad("service_by", "%q is none of app, vip, secure_vip", c.ServiceBy)
	}
	if !slices.Contains([]string{"", addressIP, addressHostname}, c.Address) {
		bad("address", "%q is neither ip nor hostname", c.Address)
	}
	errs = append(errs, c.Services.Check("services")...)
	errs = append(errs, c.Ports.Check("ports")...)
	for i, p := range c.Ports {
		if p.Name == portNameSecure {
			bad(fmt.Sprintf("ports[%d].name", i), "%q is the name of an instance's secure port", p.Name)
		}
	}
	errs = append(errs, c.Interval.Check("interval", time.Second, 10*time.Minute)...)
	errs = append(errs, c.FullInterval.Check("full_interval", time.Minute, 24*time.Hour)...)
	errs = append(errs, c.RemoveGrace.Check("remove_grace", 0, time.Hour)...)
	if !(c.MinShare >= 0 && c.MinShare <= 1) {
		bad("min_share", "%v is outside 0 to 1", c.MinShare)
	}
	return errors.Join(errs...)
}

// baseURL returns the URL that API paths are appended to.
func baseURL(server string) string {
	u, err := url.Parse(server)
	if err == nil && strings.Trim(u.Path, "/") == "" {
		u.Path = "/eureka"
		server = u.String()
	}
	return strings.TrimRight(server, "/")
}

// access returns what the adapter needs of its machine.
func (c Config) access() plugin.Access { return plugin.Access{Ports: plugin.URLPorts(c.Servers)} }
