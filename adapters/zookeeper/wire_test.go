package zookeeper

import (
	"bytes"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// FuzzMessage shows that no message of a server makes a reader panic, or use
// more memory than a few times what it got.
func FuzzMessage(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x01a\x00\x00\x00\x01b"))
	f.Add([]byte("\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x03\x00\x00\x00\x02/a"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := parseMessage(b); err == nil {
			list, data := m.body, m.body
			for _, s := range list.strings() {
				if len(s) > len(b) {
					t.Errorf("%d bytes of %d", len(s), len(b))
				}
			}
			if len(data.bytes()) > len(b) {
				t.Error("more than there is")
			}
			_, _ = parseEvent(m.body)
			_ = m.code.Error()
		}
		_, _ = parseConnected(b)
		if frame, err := readFrame(bytes.NewReader(b), maxFrame); err == nil && len(frame) > len(b) {
			t.Error("more than there is")
		}
		_, _ = digestMD5(b, "user", "password", "nonce")
	})
}

// FuzzTree shows that nothing that nodes have makes the tree panic, and that
// what it says of them can be used: each instance has an ID of its own.
func FuzzTree(f *testing.F) {
	f.Add("shop", []byte(`{"address":"10.0.0.1","port":80,"payload":{"metadata":{"dubbo.endpoints":"[{\"port\":1,\"protocol\":\"tri\"}]","dubbo.metadata.revision":"r","dubbo.metadata.storage-type":"remote"}}}`),
		[]byte(`{"services":{"a:tri":{"name":"a","protocol":"tri","port":1,"params":{"methods":"x"}}}}`), "dubbo%3A%2F%2F10.0.0.1%3A20880%2Fa%3Fgroup%3Dg%26weight%3D7", "override%3A%2F%2F0.0.0.0%2Fa%3Fweight%3D5")
	deep := []byte(strings.Repeat(`{"payload":`, 9000) + "1" + strings.Repeat("}", 9000))
	f.Add("deep", deep, deep, "", "")
	f.Fuzz(func(t *testing.T, app string, data, metadata []byte, provider, rule string) {
		tree := newTree(DefaultConfig, func(registry.Key) bool { return true }, nil)
		tree.setInterfaces([]string{"a"})
		tree.setProviders("a", []string{provider, provider + "%26x%3Dy"})
		tree.setRules("a", []string{rule})
		for _, name := range tree.setMappings([]string{"a"}) {
			tree.setMapping(name, []string{app, app + "2"})
		}
		tree.setApps([]string{app})
		tree.setInstances(app, []string{"1", "2"})
		for _, id := range []string{"1", "2"} {
			if wanted := tree.setInstance(app, id, data); wanted != "" {
				tree.setRevision(app, wanted, metadata)
			}
		}
		for u := range tree.units() {
			services, _ := tree.compose(u)
			keys := map[registry.Key]bool{}
			for _, s := range services {
				if keys[s.Service.Key] || s.Service.Key.Name == "" && app != "" {
					t.Errorf("the key %q twice, or none", s.Service.Key)
				}
				keys[s.Service.Key] = true
				ids := map[string]bool{}
				for _, in := range s.Instances {
					if ids[in.ID] || in.ID == "" {
						t.Errorf("the ID %q twice, or none", in.ID)
					}
					ids[in.ID] = true
				}
			}
		}
		_ = newLayout(DefaultConfig).place(app + "/" + provider)
	})
}

// TestDigestMD5 shows the answer of RFC 2831 to a challenge, for the service
// of ZooKeeper.
func TestDigestMD5(t *testing.T) {
	challenge := []byte(`realm="zk-sasl-md5",nonce="OA6MG9tEQGm2hh",qop="auth",charset=utf-8,algorithm=md5-sess`)
	answer, err := digestMD5(challenge, "chris", "secret", "OA6MHXh6VqTrRk")
	if err != nil {
		t.Fatal(err)
	}
	got := directives(string(answer))
	if got["username"] != "chris" || got["nonce"] != "OA6MG9tEQGm2hh" || got["cnonce"] != "OA6MHXh6VqTrRk" || got["qop"] != "auth" || len(got["response"]) != 32 {
		t.Errorf("%s", answer)
	}
	for _, wrong := range []string{"", "nonce", `nonce="x",algorithm=md5`, `realm="a\",nonce="x",algorithm=md5-sess`} {
		if answer, err := digestMD5([]byte(wrong), "u", "p", "n"); err == nil {
			t.Errorf("%q: %s", wrong, answer)
		}
	}
	if _, err := digestMD5(challenge, `a"b`, "p", "n"); err == nil || !strings.Contains(err.Error(), "quote") {
		t.Errorf("%v", err)
	}
}
