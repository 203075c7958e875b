package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

func newDump() *cobra.Command {
	var timeout time.Duration
	var rejected bool
	var host string
	waypoint := "waypoint"
	consumer := &oneOf{"", []string{"kubernetes"}}
	output := &oneOf{"yaml", []string{"yaml", "json"}}
	wanted := &oneOf{"inline", []string{"inline", "workload"}}
	cmd := &cobra.Command{
		Use:   "dump --config FILE",
		Short: "Print what would be served, as YAML for kubectl",
		Long: `Start the registries of a configuration, wait until each has listed everything, print what would be served, and exit.

The output is one YAML document per resource, sorted, for 'kubectl apply -f -' in a cluster that has the namespaces. No port is opened, so you
can run this next to a bridge with the same configuration.

A registry that is not required and cannot be reached is left out; standard error says so.

Standard error lists what cannot be served as the registry has it, with the reason. The exit code is 0 then, too.
--for kubernetes prints what ambient needs of these services in Kubernetes, next to the xDS listener that istiod follows: a stub for each, which is a
ServiceEntry with its host, address and ports, the label of a waypoint, and no endpoints. It changes when a service does, never when an instance does.
Of each consumer in the configuration it prints what that one writes: with publish: services, a Service and EndpointSlices for each service.

--rejected prints only the list on standard error, as YAML on standard output, together with what is skipped: instances that fail their
check, are disabled or have weight 0, and what a filter leaves out. Each item has registry, id, the field of the
configuration that would change it (none if only the registry can), and reason.`,
		Example: `  isthmus dump --config isthmus.yaml | kubectl apply -f -
  isthmus dump --config isthmus.yaml --for kubernetes --waypoint istio-ingress/shared`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait for the registries")
	cmd.Flags().BoolVar(&rejected, "rejected", false, "print what is left out or altered, instead of what would be served")
	cmd.Flags().StringVar(&host, "host", "", "print only the ServiceEntries of hosts that match this `PATTERN`, such as *.example.org, and their WorkloadEntries")
	cmd.Flags().Var(consumer, "for", "print the objects for consumers that read only Kubernetes, instead of what istiod receives")
	cmd.Flags().StringVar(&waypoint, "waypoint", waypoint, "with --for, the waypoint of the services: its `NAME`, or NAMESPACE/NAME if it is in another namespace than the service")
	cmd.Flags().VarP(output, "output", "o", "format: YAML documents for kubectl, or one JSON object on each line")
	cmd.Flags().Var(wanted, "shape", "print services with their endpoints, or with a WorkloadEntry for each")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if timeout <= 0 {
			return usageError(cmd, fmt.Errorf("--timeout %s: must be more than 0", timeout))
		}
		if _, err := path.Match(host, ""); err != nil {
			return usageError(cmd, fmt.Errorf("--host %s: is not a pattern: %w", host, err))
		}
		only, err := consumerOf(waypoint)
		if err != nil {
			return usageError(cmd, err)
		}
		for flag, with := range map[string]bool{"shape": false, "waypoint": true} {
			if cmd.Flags().Changed(flag) && (consumer.value != "") != with {
				return usageError(cmd, fmt.Errorf("--%s does not go with what is printed: --for kubernetes has --waypoint, anything else --shape", flag))
			}
		}
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		consumers := cfg.Consumers.Kubernetes
		if len(consumers) == 0 {
			consumers = []config.Kubernetes{*only}
		} else if cmd.Flags().Changed("waypoint") {
			return usageError(cmd, errors.New("--waypoint is for a configuration without consumers.kubernetes, which names the waypoint"))
		}
		shape, err := encode.ParseShape(wanted.value)
		if err != nil {
			return usageError(cmd, err)
		}
		cfg.Log.Level = "error" // warnings are among the problems
		log := cfg.Log.Logger(cmd.ErrOrStderr())
		if _, err := checkPlugins(ctx, &cfg, log); err != nil {
			return err
		}
		s, err := newServer(cfg, server.Options{Log: log})
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		group, ctx := errgroup.WithContext(ctx)
		// Without listeners the server has no sinks.
		group.Go(func() error { return runServer(ctx, s) })
		group.Go(func() error {
			defer cancel()
			limited, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			if err := s.WaitSynced(limited); err != nil {
				if ctx.Err() != nil {
					return nil // a signal, or the error of the server
				}
				writeProblems(cmd.ErrOrStderr(), s.Problems())
				return &exitError{exitTimeout, fmt.Errorf("the registries did not list what they hold within %s (--timeout):\n%w", timeout, err)}
			}
			for _, c := range s.Assess() {
				fmt.Fprintln(cmd.ErrOrStderr(), c)
			}
			if rejected {
				return writeRejected(cmd.OutOrStdout(), append(s.Problems(), s.Skipped()...))
			}
			if consumer.value != "" {
				problems := s.Problems()
				for i := range consumers {
					planned, without := s.Plan(&consumers[i])
					if err := writePlanned(cmd.OutOrStdout(), output.value, host, planned); err != nil {
						return err
					}
					problems = append(problems, without...)
				}
				writeProblems(cmd.ErrOrStderr(), problems)
				return nil
			}
			resources, err := s.Resources(shape)
			if err != nil {
				return err
			}
			writeProblems(cmd.ErrOrStderr(), s.Problems())
			if host != "" {
				resources = resourcesOf(host, resources)
			}
			return writeResources(cmd.OutOrStdout(), output.value, resources)
		})
		return group.Wait()
	}
	return cmd
}

// writeProblems lists what is not served as the registry has it.
func writeProblems(w io.Writer, problems []server.Problem) {
	for _, p := range problems {
		fmt.Fprintf(w, "registry %s: %s: %s\n", p.Registry, p.ID, p.Reason)
	}
	if len(problems) > 0 {
		fmt.Fprintln(w, problemCount(len(problems)))
	}
}

// writeRejected lists what is not served as the registry has it, as YAML.
func writeRejected(w io.Writer, problems []server.Problem) error {
	type entry struct {
		Registry string `json:"registry"`
		ID       string `json:"id"`
		Field    string `json:"field,omitempty"`
		Reason   string `json:"reason"`
	}
	list := make([]entry, 0, len(problems))
	for _, p := range problems {
		list = append(list, entry{p.Registry, p.ID, p.Field, p.Reason})
	}
	b, err := yaml.Marshal(list)
	if err != nil {
		return fmt.Errorf("list what is left out: %w", err)
	}
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// versions are the API versions in Kubernetes of kinds that are not v1.
var versions = map[string]string{
	"networking.istio.io/EnvoyFilter": "v1alpha3",
	"networking.istio.io/ProxyConfig": "v1beta1",
}

// object is a resource in the format of Kubernetes.
type object struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   metadata        `json:"metadata"`
	Spec       json.RawMessage `json:"spec"`
}

type metadata struct {
	Name        string            `json:"name"`
	Namespace   string            `json:"namespace,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// resourcesOf returns the ServiceEntries of hosts that fit a pattern, with
// their WorkloadEntries.
func resourcesOf(pattern string, resources []server.Resource) []server.Resource {
	services := make(map[string]bool) // by namespace and selector
	return slices.DeleteFunc(resources, func(r server.Resource) bool {
		body, err := r.GetBody().UnmarshalNew()
		if err != nil {
			return true
		}
		namespace, _, _ := strings.Cut(r.GetMetadata().GetName(), "/")
		switch body := body.(type) {
		case *networking.ServiceEntry: // before all WorkloadEntries
			fits := slices.ContainsFunc(body.GetHosts(), func(h string) bool {
				ok, _ := path.Match(pattern, h) // checked before
				return ok
			})
			if label := body.GetWorkloadSelector().GetLabels()[encode.SelectorLabel]; fits && label != "" {
				services[namespace+"/"+label] = true
			}
			return !fits
		case *networking.WorkloadEntry:
			return !services[namespace+"/"+body.GetLabels()[encode.SelectorLabel]]
		}
		return true
	})
}

// writeResources writes resources as YAML documents, or as JSON with one object
// on a line.
func writeResources(w io.Writer, format string, resources []server.Resource) error {
	for _, r := range resources {
		doc, err := document(r.Collection, r.Resource)
		if err == nil {
			err = writeDocument(w, format, doc)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", r.Collection, r.GetMetadata().GetName(), err)
		}
	}
	return nil
}

// consumerOf returns the consumer of a configuration without one, for a
// waypoint NAME or NAMESPACE/NAME.
func consumerOf(waypoint string) (*config.Kubernetes, error) {
	namespace, name, both := strings.Cut(waypoint, "/")
	if !both {
		namespace, name = "", waypoint
	}
	if name == "" || both && namespace == "" || strings.Contains(name, "/") {
		return nil, fmt.Errorf("--waypoint %s: must be NAME or NAMESPACE/NAME", waypoint)
	}
	k := config.DefaultKubernetes
	k.Name, k.Waypoint = "dump", config.Waypoint{Name: name, Namespace: namespace}
	return &k, nil
}

// writePlanned writes the objects of hosts that fit a pattern, all without one.
func writePlanned(w io.Writer, format, pattern string, planned []server.Planned) error {
	for _, p := range planned {
		if pattern != "" && !slices.ContainsFunc(p.Hosts, func(h string) bool {
			ok, _ := path.Match(pattern, h) // checked before
			return ok
		}) {
			continue
		}
		for _, o := range p.Objects {
			if err := writeDocument(w, format, o.Object); err != nil {
				return fmt.Errorf("%s %s/%s: %w", o.GetKind(), o.GetNamespace(), o.GetName(), err)
			}
		}
	}
	return nil
}

// writeDocument writes an object as a YAML document, or as a line of JSON.
func writeDocument(w io.Writer, format string, object any) error {
	doc, err := yaml.Marshal(object)
	switch {
	case err != nil:
		return err
	case format == "json":
		if doc, err = yaml.YAMLToJSON(doc); err != nil {
			return err
		}
		doc = append(doc, '\n')
	default:
		doc = append([]byte("---\n"), doc...)
	}
	if _, err = w.Write(doc); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

func document(coll string, res *mcp.Resource) (*object, error) {
	body, err := res.GetBody().UnmarshalNew()
	if err != nil {
		return nil, err
	}
	spec, err := protojson.Marshal(body)
	if err != nil {
		return nil, err
	}
	group, kind, _ := strings.Cut(coll, "/")
	o := &object{APIVersion: group + "/" + cmp.Or(versions[coll], "v1"), Kind: kind, Spec: spec}
	m := res.GetMetadata()
	o.Metadata.Namespace, o.Metadata.Name, _ = strings.Cut(m.GetName(), "/")
	o.Metadata.Labels, o.Metadata.Annotations = m.GetLabels(), m.GetAnnotations()
	return o, nil
}
