// Command newest says what the newest Istio that builds would reject. It reads
// resources from standard input, each an encoded istio.mcp.v1alpha1.Resource
// behind its length in four bytes, big endian, and writes a line of JSON for
// each that Istio's own validation rejects: its place among the resources, from
// 0 on, and the reason. The last line counts what was read.
package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"istio.io/istio/pkg/config"
	"istio.io/istio/pkg/config/schema/gvk"
	"istio.io/istio/pkg/config/validation"
)

// rejected is one line of the output.
type rejected struct {
	Index  int    `json:"index"`
	Reason string `json:"reason"`
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(r io.Reader, w io.Writer) error {
	in, out := bufio.NewReaderSize(r, 1<<20), bufio.NewWriter(w)
	lines := json.NewEncoder(out)
	var size [4]byte
	var buf []byte
	for n := 0; ; n++ {
		if _, err := io.ReadFull(in, size[:]); errors.Is(err, io.EOF) {
			if err := lines.Encode(map[string]int{"read": n}); err != nil {
				return err
			}
			return out.Flush()
		} else if err != nil {
			return fmt.Errorf("resource %d: %w", n, err)
		}
		length := int(binary.BigEndian.Uint32(size[:]))
		if cap(buf) < length {
			buf = make([]byte, length)
		}
		buf = buf[:length]
		if _, err := io.ReadFull(in, buf); err != nil {
			return fmt.Errorf("resource %d: %w", n, err)
		}
		if err := check(buf); err != nil {
			if err := lines.Encode(rejected{n, err.Error()}); err != nil {
				return err
			}
		}
	}
}

// check decodes a resource as istiod does and validates it.
func check(b []byte) error {
	res := &mcp.Resource{}
	if err := proto.Unmarshal(b, res); err != nil {
		return err
	}
	namespace, name, ok := strings.Cut(res.GetMetadata().GetName(), "/")
	if !ok {
		return fmt.Errorf("metadata.name %q is not namespace/name", res.GetMetadata().GetName())
	}
	body, err := res.GetBody().UnmarshalNew()
	if err != nil {
		return err
	}
	cfg := config.Config{Spec: body, Meta: config.Meta{
		Name: name, Namespace: namespace, Labels: res.Metadata.Labels, Annotations: res.Metadata.Annotations,
		CreationTimestamp: res.Metadata.CreateTime.AsTime(),
	}}
	switch body.(type) {
	case *networking.ServiceEntry:
		cfg.GroupVersionKind = gvk.ServiceEntry
		_, err = validation.ValidateServiceEntry(cfg)
	case *networking.WorkloadEntry:
		cfg.GroupVersionKind = gvk.WorkloadEntry
		_, err = validation.ValidateWorkloadEntry(cfg)
	case *networking.DestinationRule:
		cfg.GroupVersionKind = gvk.DestinationRule
		_, err = validation.ValidateDestinationRule(cfg)
	default:
		err = fmt.Errorf("%s: nothing validates this kind", res.Body.TypeUrl)
	}
	return err
}
