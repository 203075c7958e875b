package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/isthmus-mesh/isthmus/internal/migrate"
)

// maxImport bounds the file that is read, in bytes.
const maxImport = 16 << 20

func newImport() *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE",
		Short: "Convert another bridge's configuration to one of isthmus",
		Long: `Read the configuration of another bridge and print one of isthmus for the same registries, with the preset that keeps hosts, ports
and labels. FILE - is standard input. It reads:

  McpBridge objects of Higress
  the configuration of slime's meshregistry (NacosSource, EurekaSource, ZookeeperSource)
  application.properties of a Nacos with its istio module
  consul2istio's flags: a command line, or its Deployment

What has no equivalent becomes a comment with its line. Secrets are not copied: environment variables take their place.`,
		Example: `  kubectl get mcpbridge -n higress-system default -o yaml | isthmus import - > isthmus.yaml
  isthmus validate --config isthmus.yaml`,
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			data, err := readFile(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			text, err := migrate.Import(data, builtIn())
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			if _, err := io.WriteString(cmd.OutOrStdout(), text); err != nil {
				return fmt.Errorf("write: %w", err)
			}
			return nil
		},
	}
}

// readFile reads a file, or in if its name is "-".
func readFile(in io.Reader, name string) ([]byte, error) {
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, maxImport+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", name, err)
	case len(data) > maxImport:
		return nil, fmt.Errorf("read %s: it has more than %d MB", name, maxImport>>20)
	}
	return data, nil
}
