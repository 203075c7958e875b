package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"k8s.io/client-go/rest"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type kubernetes. Missing fields
// default to DefaultConfig.
type Config struct {
	Follow string `json:"follow,omitempty" jsonschema:"enum=services,enum=exports,enum=imports,enum=istio" jsonschema_description:"What to follow in the cluster: services, with their endpoints; exports, those that a ServiceExport of their name exports; imports, ServiceImports, with the endpoints that another program wrote into the cluster; or istio, Istio's own kinds, which are published as they are. Default: services."`

	KubeconfigFile string     `json:"kubeconfig_file,omitempty" jsonschema_description:"Kubeconfig with the server and the user, read again for every session. Default: none; server, token_file and tls hold, whose defaults are those of a pod in the cluster."`
	Context        string     `json:"context,omitempty" jsonschema_description:"Context of the kubeconfig. Default: its current one."`
	Contexts       []string   `json:"contexts,omitempty" jsonschema_description:"Several contexts of the kubeconfig in place of context, each a cluster of its own. A service that several have under one namespace and name is one service with the endpoints of all."`
	Exec           string     `json:"exec,omitempty" jsonschema_description:"Path of the program from which a user of the kubeconfig may get tokens, as for EKS, GKE and AKS: /usr/local/bin/aws-iam-authenticator. Its name must be that of the kubeconfig's. Default: none."`
	Server         string     `json:"server,omitempty" jsonschema_description:"URL of the API server. Default: https://kubernetes.default.svc."`
	TokenFile      string     `json:"token_file,omitempty" jsonschema_description:"File that holds the token of a service account, read again once a minute, and when the server refuses it. Default: that of the pod, unless tls has a client certificate."`
	TLS            plugin.TLS `json:"tls,omitempty" jsonschema_description:"TLS towards the server. Default: the authority that the pod is given."`

	Namespaces []string         `json:"namespaces,omitempty" jsonschema_description:"Namespaces to follow, each with its own requests, for which a Role in each is enough. Default: all, which takes a ClusterRole."`
	Labels     string           `json:"labels,omitempty" jsonschema_description:"Selector by labels of Services, of ServiceImports, or of the resources of Istio, as kubectl has it: app in (a,b),!canary. Default: all."`
	Select     plugin.Selection `json:"select,omitempty" jsonschema_description:"Which of them to follow, by namespace/name."`
	Pods       Pods             `json:"pods,omitempty" jsonschema_description:"What endpoints get from their pods, which are then watched, too. Default: nothing."`
	Revision   string           `json:"revision,omitempty" jsonschema_description:"For follow: istio, the revision (label istio.io/rev) whose resources are published, and those without the label. Default: all."`

	Timeout     plugin.Duration `json:"timeout,omitempty" jsonschema_description:"How long a request may take, and how long a server may be silent on an open connection, 1s to 10m. Default: 30s."`
	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long missing instances are kept after an outage or a sudden loss. 0s removes at once. Default: 1m."`
	MinShare    float64         `json:"min_share,omitempty" jsonschema:"minimum=0,maximum=1" jsonschema_description:"Share of the known instances that a new listing must still have to be believed at once. With less, missing ones are kept for remove_grace. 0 believes every share. Default: 0.5."`
	AcceptEmpty bool            `json:"accept_empty,omitempty" jsonschema_description:"Believe a cluster without any endpoint, or without any resource of Istio. By default it removes nothing."`
}

// Pods is what endpoints get of their pods.
type Pods struct {
	Labels          plugin.Globs `json:"labels,omitempty" jsonschema_description:"Globs (* any run, ? one character, [a-z] one of), or regular expressions behind a ~, for the labels of pods that become metadata of their endpoints. Those with a meaning to Istio need owns.labels. Default: none."`
	ServiceAccounts bool         `json:"service_accounts,omitempty" jsonschema_description:"Whether an endpoint has the service account of its pod, if that has a sidecar (label security.istio.io/tlsMode: istio): clients then use mutual TLS to it."`
}

// watched reports whether pods are watched.
func (p Pods) watched() bool { return len(p.Labels) > 0 || p.ServiceAccounts }

// Values of Config.Follow.
const (
	followServices = "services"
	followExports  = "exports"
	followImports  = "imports"
	followIstio    = "istio"
)

// What a pod is given for the API server.
const (
	podServer = "https://kubernetes.default.svc"
	podFiles  = "/var/run/secrets/kubernetes.io/serviceaccount/"
)

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Follow:      followServices,
	Timeout:     plugin.Duration(30 * time.Second),
	RemoveGrace: plugin.Duration(time.Minute),
	MinShare:    0.5,
}

// isName matches the name of a namespace.
var isName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	if !slices.Contains([]string{"", followServices, followExports, followImports, followIstio}, c.Follow) {
		bad("follow", "%q is none of services, exports, imports, istio", c.Follow)
	}
	if c.KubeconfigFile != "" {
		for field, set := range map[string]bool{"server": c.Server != "", "token_file": c.TokenFile != "", "tls": c.TLS != plugin.TLS{}} {
			if set {
				bad(field, "kubeconfig_file is set too, which says it; keep one of them")
			}
		}
	} else {
		for field, set := range map[string]bool{"context": c.Context != "", "contexts": len(c.Contexts) > 0, "exec": c.Exec != ""} {
			if set {
				bad(field, "is for a kubeconfig; set kubeconfig_file")
			}
		}
	}
	if c.Context != "" && len(c.Contexts) > 0 {
		bad("context", "contexts is set too; keep one of them")
	}
	for i, context := range c.Contexts {
		at := fmt.Sprintf("contexts[%d]", i)
		if context == "" {
			bad(at, "is empty; name a context of the kubeconfig")
		} else if slices.Contains(c.Contexts[:i], context) {
			bad(at, "%q is listed twice", context)
		}
	}
	if c.Exec != "" && !filepath.IsAbs(c.Exec) {
		bad("exec", "%q is not an absolute path", c.Exec)
	}
	if c.Server != "" {
		errs = append(errs, checkServer("server", c.Server)...)
	}
	errs = append(errs, c.TLS.Check("tls")...)
	for i, ns := range c.Namespaces {
		at := fmt.Sprintf("namespaces[%d]", i)
		if !isName.MatchString(ns) {
			bad(at, "%q is not a name of a namespace; for patterns use select", ns)
		} else if slices.Contains(c.Namespaces[:i], ns) {
			bad(at, "%q is listed twice", ns)
		}
	}
	errs = append(errs, c.Select.Check("select")...)
	errs = append(errs, c.Pods.Labels.Check("pods.labels")...)
	if c.Pods.watched() && (c.Follow == followImports || c.Follow == followIstio) {
		bad("pods", "is for follow: services and exports")
	}
	if c.Revision != "" && c.Follow != followIstio {
		bad("revision", "is for follow: istio")
	}
	errs = append(errs, c.Timeout.Check("timeout", time.Second, 10*time.Minute)...)
	errs = append(errs, c.RemoveGrace.Check("remove_grace", 0, time.Hour)...)
	if !(c.MinShare >= 0 && c.MinShare <= 1) {
		bad("min_share", "%v is outside 0 to 1", c.MinShare)
	}
	return errors.Join(errs...)
}

// checkServer checks a URL of an API server.
func checkServer(field, server string) []error {
	errs := plugin.CheckServers(field, []string{server})
	for i, err := range errs {
		if e, ok := errors.AsType[*plugin.FieldError](err); ok {
			errs[i] = &plugin.FieldError{Field: field, Reason: e.Reason}
		}
	}
	return errs
}

// clusters returns a configuration for each cluster.
func (c Config) clusters() (all []Config) {
	for _, context := range c.Contexts {
		of := c
		of.Context, of.Contexts = context, nil
		all = append(all, of)
	}
	if len(all) == 0 {
		return []Config{c}
	}
	return all
}

// access returns what the adapter needs of its machine.
func (c Config) access() (a plugin.Access) {
	for _, of := range c.clusters() {
		k, err := of.cluster()
		if err != nil {
			return plugin.Access{AnyPort: true} // New says what is wrong
		}
		one := k.access()
		a.Read, a.Ports = append(a.Read, one.Read...), append(a.Ports, one.Ports...)
	}
	return a
}

// cluster returns the server and the user that the configuration names, files
// read as they are now.
func (c Config) cluster() (*cluster, error) {
	if c.KubeconfigFile != "" {
		k, err := readKubeconfig(c.KubeconfigFile, c.Context)
		if err != nil {
			return nil, &plugin.FieldError{Field: "kubeconfig_file", Reason: err.Error()}
		}
		if k.exec != nil {
			if err := checkExec(k.exec, c.Exec); err != nil {
				return nil, &plugin.FieldError{Field: "kubeconfig_file", Reason: err.Error()}
			}
		}
		return k, nil
	}
	k := &cluster{config: &rest.Config{Host: cmp.Or(c.Server, podServer), BearerTokenFile: c.TokenFile}, tls: c.TLS}
	if c.TokenFile == "" && c.TLS.CertFile == "" {
		k.config.BearerTokenFile = podFiles + "token"
	}
	if c.Server == "" && c.TLS == (plugin.TLS{}) {
		k.tls.CAFile = podFiles + "ca.crt"
	}
	return k, nil
}
