package main

import (
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/doctor"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// A listener whose certificate comes from a Workload API has no file that could
// be missing.
func TestDoctorWorkloadAPI(t *testing.T) {
	cfg, err := config.Parse("isthmus.yaml", []byte(`
listen: {admin: 127.0.0.1:0, xds: {address: "127.0.0.1:15051", tls: {workload_api: "unix:///run/spire/agent.sock", client_auth: request}}}
registries: [{name: load, type: sim}]
`), configOptions())
	if err != nil {
		t.Fatal(err)
	}
	report := &doctor.Report{}
	if b := bridgeOf(report, &cfg); len(report.Findings) > 0 || !b.TLS || b.ClientCertificate || b.Certificate != nil {
		t.Errorf("%+v with findings %v", b, report.Findings)
	}
	if _, err := meshConfig(&cfg, "", ""); err == nil || !strings.Contains(err.Error(), "listen.xds: tls.workload_api: ") {
		t.Errorf("meshconfig: %v", err)
	}
}
